"""Commands that prepare a cluster: check its file, make certificates, and look for problems on this machine."""
