"""What the command line offers, a function a command; tyro makes arguments of theirs."""
