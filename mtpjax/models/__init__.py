"""Model definition: configuration, trunk, MTP modules, caches, sharding."""
