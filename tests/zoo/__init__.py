"""The networks every exact quantity is tested on, one file a family. `cases.CASES` gathers them."""
