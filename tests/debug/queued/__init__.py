"""Operations that all ranks have issued, and that wait behind others on a device."""
