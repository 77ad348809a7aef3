"""Who am I: environment variables in, one frozen record out. Nothing here reads `os.environ` or calls a program."""
