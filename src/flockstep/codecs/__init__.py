"""Array → bytes → array, with a wire size that is known beforehand."""
