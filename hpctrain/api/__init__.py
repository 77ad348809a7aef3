"""The API for programs and notebooks; `import hpctrain` has its names.

Nothing here prints or exits: notices are records of the logger `hpctrain`, and mistakes are exceptions.
"""
