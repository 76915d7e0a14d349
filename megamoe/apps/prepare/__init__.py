"""Text, tables and URLs to the .bin/.idx files that pretraining reads."""
