"""What nanonorm's scripts share; and the texts, the vocabulary and the recorded runs."""
