//! The hook's stages, for engines without the shim and for `run`, which deletes by itself.
