// Determines from cuFile's properties and the file system whether cuFile moves a file's bytes
// directly between device and storage, or silently through host memory ("compat mode"). It must not
// know blocks or transfers.
#pragma once

#include <string>

#include "gds/cufile_shim.h"

namespace fastckpt {

struct GdsMode {
    bool direct;
    std::string why;
    const char* name() const { return direct ? "direct" : "compat"; }
};

// The file system's type by the mount table, such as "ext4"; empty if it is not known.
std::string file_system_of(int fd);

// The mode that cuFile claims. Single requests may still go through the host: unaligned ones, those
// that cufile.json sends there (for Weka and Spectrum Scale separately for reads and writes), and
// those for devices that the driver does not serve. Only cufile.log shows them.
GdsMode gds_mode(const cufile::Properties& properties, const std::string& file_system);

}  // namespace fastckpt
