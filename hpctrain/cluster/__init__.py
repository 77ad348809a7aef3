"""This process's place among the ranks: derive one frozen record from environment variables.

Nothing here reads `os.environ` or runs a program.
"""
