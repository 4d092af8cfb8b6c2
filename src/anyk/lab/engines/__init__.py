"""Many runs: in processes of this machine, or on a Ray cluster."""
