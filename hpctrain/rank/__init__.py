"""The life of a rank's process: its entry, devices, rendezvous, process groups, watchdog, stop and exit record."""
