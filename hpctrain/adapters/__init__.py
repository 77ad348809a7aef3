"""What connects programs of other libraries with `hpctrain.session`."""
