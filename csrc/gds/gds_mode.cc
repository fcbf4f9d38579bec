// Reads cuFile's properties and the mount table: see gds_mode.h.
#include "gds/gds_mode.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <fstream>
#include <sstream>
#include <vector>

namespace fastckpt {

namespace {

using cufile::Storage;

constexpr bool has(unsigned flags, unsigned bit) { return (flags >> bit & 1u) != 0; }

struct Served {
    const char* file_system;
    std::vector<Storage> by;  // any one of these
};

// The driver's bits for each file system. The one of a local file system is that of its disk, which
// is not known here.
const std::vector<Served>& served() {
    using namespace cufile;
    static const std::vector<Storage> local = {kNvme, kNvmeOf, kScsi, kScaleFlux, kNvMesh};
    static const std::vector<Served> all = {
        {"ext4", local},       {"xfs", local},          {"lustre", {kLustre}},
        {"wekafs", {kWekaFs}}, {"nfs", {kNfs}},         {"nfs4", {kNfs}},
        {"gpfs", {kGpfs}},     {"beegfs", {kBeeGfs}},   {"beegfs_nodev", {kBeeGfs}},
        {"panfs", {kPanFs}},   {"scatefs", {kScateFs}}, {"virtiofs", {kVirtioFs}},
    };
    return all;
}

}  // namespace

// proc(5): "36 35 98:0 /root /mount options fields... - ext4 source options".
std::string file_system_of(int fd) {
    struct stat file{};
    if (fstat(fd, &file) != 0) return "";
    const std::string device =
        std::to_string(major(file.st_dev)) + ":" + std::to_string(minor(file.st_dev));
    std::ifstream table("/proc/self/mountinfo");
    for (std::string line; std::getline(table, line);) {
        std::istringstream fields(line);
        std::string number, parent, numbers;
        if (!(fields >> number >> parent >> numbers) || numbers != device) continue;
        const size_t end = line.find(" - ");
        if (end == std::string::npos) continue;
        return line.substr(end + 3, line.find(' ', end + 3) - (end + 3));
    }
    return "";
}

GdsMode gds_mode(const cufile::Properties& properties, const std::string& file_system) {
    const auto& nvfs = properties.nvfs;
    const std::string name = file_system.empty() ? "an unknown file system" : file_system;
    if (has(nvfs.control, cufile::kPosixMode))
        return {false, "cuFile is configured to use POSIX calls"};
    const bool loaded = nvfs.major_version != 0 || nvfs.minor_version != 0;
    const bool p2p =
        has(properties.features, cufile::kP2pFeature) || has(nvfs.status, cufile::kNvmeP2p);
    if (!loaded && !p2p) return {false, "nvidia-fs is not loaded, and there is no PCI P2PDMA"};
    for (const Served& candidate : served()) {
        if (file_system != candidate.file_system) continue;
        const bool local = candidate.by.size() > 1;
        bool by_driver = false;
        for (const Storage bit : candidate.by) by_driver = by_driver || has(nvfs.status, bit);
        if (loaded && by_driver)
            return {true, "nvidia-fs " + std::to_string(nvfs.major_version) + "." +
                              std::to_string(nvfs.minor_version) + " serves " + name};
        if (p2p && local) return {true, "PCI P2PDMA serves " + name};
        return {false, "cuFile's driver does not serve " + name + " here"};
    }
    return {false, "cuFile does not know " + name};
}

}  // namespace fastckpt
