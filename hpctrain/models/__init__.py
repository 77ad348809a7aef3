"""Small models for the tasks that hpctrain ships."""
