"""The ranks of one attempt as one: rendezvous, process group, agreement, replicas."""
