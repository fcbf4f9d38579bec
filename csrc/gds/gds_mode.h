// Whether cuFile moves a file's bytes between device and storage directly, or through the host's
// memory ("compat mode"), which it does silently. Responsible for what can be told from its
// properties and the file system; must not know blocks or transfers.
#pragma once

#include <string>

#include "gds/cufile_shim.h"

namespace fastckpt {

struct GdsMode {
    bool direct;
    std::string why;
    const char* name() const { return direct ? "direct" : "compat"; }
};

// "ext4", as the mount table has it; empty where it does not say.
std::string file_system_of(int fd);

// What cuFile claims. Single requests may go through the host all the same: unaligned ones, those
// that cufile.json sends there (for Weka and Spectrum Scale it tells reads from writes), and those
// for devices of a file system that are not what the driver serves. Only cufile.log tells those.
GdsMode gds_mode(const cufile::Properties& properties, const std::string& file_system);

}  // namespace fastckpt
