"""Reports: what a run or a sweep did, as one page that needs no network."""
