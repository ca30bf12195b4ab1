"""Which files and packages a host needs to run the user's code. Runs in: coordinator."""
