"""Callbacks that connect programs of other libraries with `hpctrain.session`."""
