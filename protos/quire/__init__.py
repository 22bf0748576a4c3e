"""The contract of Quire's services. With this file the package goes before modules of its name later on the path."""
