"""Names and bytes on disk: headers that are checked before they are trusted, streaming loads, bit-exact saves."""
