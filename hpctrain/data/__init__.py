"""The data that ranks train on: order, batch arithmetic, datasets, loaders."""
