"""Moving layers to the device behind the computation: one file for each kind of device."""
