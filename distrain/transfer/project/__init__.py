"""The files and packages that a host needs to run the user's code. Runs in: coordinator."""
