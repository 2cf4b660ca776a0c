"""``alchemist virtual-cluster``: Ray in virtual machines, several to a host, tuned for computing.

After Younge et al., "Enabling Diverse Software Stacks on Supercomputers using High Performance
Virtual Clusters", SAND2017-5325.
"""
