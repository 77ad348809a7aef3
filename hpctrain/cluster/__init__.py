"""This process's place among the ranks: environment variables in, one frozen record out.

Nothing here reads `os.environ` or runs a program.
"""
