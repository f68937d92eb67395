"""Jobs: engines that start them, workers that train them, locks that keep them apart."""
