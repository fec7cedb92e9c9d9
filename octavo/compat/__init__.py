"""Other libraries' call signatures over Octavo. Nothing here computes: it renames, refuses and passes on."""
