"""Request traces through the real loft, catalog and policies; memory is books alone."""
