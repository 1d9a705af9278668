"""What clients touch: routes, bodies, errors, the relay of answers. No routing decision is taken here."""
