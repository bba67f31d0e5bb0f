"""A small world of images and questions: what the tiny models learn and `spyglass eval` asks."""
