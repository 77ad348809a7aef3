"""A rank's process: its devices, rendezvous, process group, stop requests and agreement."""
