"""The world that a rank belongs to: joining it, leaving it, forming new generations, releasing a stuck rank."""
