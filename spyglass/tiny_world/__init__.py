"""A small world of pictures and questions: what the tiny models learn and `spyglass eval` asks."""
