"""What is known of torch's operations by name: one record for each, and recurrent layers written out."""
