"""What a target and a draft have to do with each other before any text is written."""
