"""What the ranks train on: order, batch arithmetic, loaders, datasets."""
