"""Numbers and curves that tell how a network learns; one file a measure."""
