"""What each command does, apart from its flags (cli.py)."""
