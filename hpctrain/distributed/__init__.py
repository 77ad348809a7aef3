"""Cooperation of the ranks of one attempt: rendezvous, process group, agreement, replicas."""
