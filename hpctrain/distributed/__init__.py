"""How the ranks of one attempt work together: rendezvous, process group, agreement, replicas."""
