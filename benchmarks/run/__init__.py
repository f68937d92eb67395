"""Jobs: engines that start them, workers that train them, claims that keep them apart."""
