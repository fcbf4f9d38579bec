// A FUSE file system that passes everything on to a directory, but for faults: one request that is
// like the line in a control file fails, once; or it hangs. What the kernel writes back is such a
// request, so that an error can be that of a write which has long returned. Built by the tests and
// run as `serve(argc, argv)`; it must not know what the files are.
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

std::string root, control;
bool writes_back = false;

std::string at(const char* path) { return root + path; }

int result(int returned) { return returned == -1 ? -errno : 0; }

// Returns -errno if the control file, which then goes away, holds "operation errno begin end" of a
// range that overlaps this one; else 0. If the errno is 0, it does not return before a file of the
// control file's name and ".over" is there.
int fault(const char* operation, off_t begin = 0, size_t nbytes = 1) {
    char wanted[32];
    int error = 0;
    long long first = 0, last = 0;
    FILE* file = std::fopen(control.c_str(), "r");
    if (file == nullptr) return 0;
    const int found = std::fscanf(file, "%31s %d %lld %lld", wanted, &error, &first, &last);
    std::fclose(file);
    const bool is_it = found == 4 && std::strcmp(wanted, operation) == 0 && begin < last &&
                       begin + static_cast<off_t>(nbytes) > first;
    if (!is_it || unlink(control.c_str()) != 0) return 0;
    while (error == 0 && access((control + ".over").c_str(), F_OK) != 0) usleep(1000);
    return -error;
}

int opened(int fd, fuse_file_info* file) {
    if (fd < 0) return -errno;
    file->fh = static_cast<uint64_t>(fd);
    return 0;
}

int fd_of(const fuse_file_info* file) { return static_cast<int>(file->fh); }

void* init(fuse_conn_info* connection, fuse_config* config) {
    if (writes_back) connection->want |= FUSE_CAP_WRITEBACK_CACHE;
    config->use_ino = 1;
    return nullptr;
}

int get_status(const char* path, struct stat* status, fuse_file_info* file) {
    if (const int error = fault("status")) return error;
    return result(file != nullptr ? fstat(fd_of(file), status) : lstat(at(path).c_str(), status));
}

int list(const char* path, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info*,
         fuse_readdir_flags) {
    DIR* directory = opendir(at(path).c_str());
    if (directory == nullptr) return -errno;
    while (const dirent* entry = readdir(directory))
        fill(buffer, entry->d_name, nullptr, 0, fuse_fill_dir_flags{});
    closedir(directory);
    return 0;
}

int make_directory(const char* path, mode_t mode) {
    const int error = fault("mkdir");
    return error != 0 ? error : result(mkdir(at(path).c_str(), mode));
}

int remove_directory(const char* path) { return result(rmdir(at(path).c_str())); }

int remove_file(const char* path) {
    const int error = fault("remove");
    return error != 0 ? error : result(unlink(at(path).c_str()));
}

int change_name(const char* path, const char* target, unsigned flags) {
    if (const int error = fault("rename")) return error;
    return result(renameat2(AT_FDCWD, at(path).c_str(), AT_FDCWD, at(target).c_str(), flags));
}

int change_mode(const char* path, mode_t mode, fuse_file_info*) {
    return result(chmod(at(path).c_str(), mode));
}

int change_owner(const char* path, uid_t user, gid_t group, fuse_file_info*) {
    return result(lchown(at(path).c_str(), user, group));
}

int cut(const char* path, off_t nbytes, fuse_file_info* file) {
    return result(file != nullptr ? ftruncate(fd_of(file), nbytes)
                                  : truncate(at(path).c_str(), nbytes));
}

int set_times(const char* path, const timespec times[2], fuse_file_info*) {
    return result(utimensat(AT_FDCWD, at(path).c_str(), times, AT_SYMLINK_NOFOLLOW));
}

// The kernel reads what it writes a part of, and passes on flags that are its own business.
int open_file(const char* path, fuse_file_info* file) {
    const int how = (file->flags & O_ACCMODE) == O_RDONLY ? O_RDONLY : O_RDWR;
    if (const int error = fault("open")) return error;
    return opened(open(at(path).c_str(), how | O_CLOEXEC), file);
}

int create_file(const char* path, mode_t mode, fuse_file_info* file) {
    if (const int error = fault("create")) return error;
    return opened(open(at(path).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode), file);
}

int read_file(const char*, char* buffer, size_t nbytes, off_t offset, fuse_file_info* file) {
    if (const int error = fault("read", offset, nbytes)) return error;
    const ssize_t n = pread(fd_of(file), buffer, nbytes, offset);
    return n < 0 ? -errno : static_cast<int>(n);
}

int write_file(const char*, const char* bytes, size_t nbytes, off_t offset, fuse_file_info* file) {
    if (const int error = fault("write", offset, nbytes)) return error;
    const ssize_t n = pwrite(fd_of(file), bytes, nbytes, offset);
    return n < 0 ? -errno : static_cast<int>(n);
}

int get_space(const char*, struct statvfs* space) { return result(statvfs(root.c_str(), space)); }

int flush(const char*, fuse_file_info*) { return fault("flush"); }

int sync_file(const char*, int, fuse_file_info* file) {
    const int error = fault("sync");
    return error != 0 ? error : result(fsync(fd_of(file)));
}

int release(const char*, fuse_file_info* file) { return result(close(fd_of(file))); }

}  // namespace

// Arguments: a name, the directory that has the files, the control file, "back" if the kernel is to
// cache writes, and those of fuse_main().
extern "C" int serve(int count, char** arguments) {
    root = arguments[1];
    control = arguments[2];
    writes_back = std::strcmp(arguments[3], "back") == 0;
    arguments[3] = arguments[0];
    umask(0);
    fuse_operations operations{};
    operations.init = init;
    operations.getattr = get_status;
    operations.readdir = list;
    operations.mkdir = make_directory;
    operations.rmdir = remove_directory;
    operations.unlink = remove_file;
    operations.rename = change_name;
    operations.chmod = change_mode;
    operations.chown = change_owner;
    operations.truncate = cut;
    operations.utimens = set_times;
    operations.open = open_file;
    operations.create = create_file;
    operations.read = read_file;
    operations.write = write_file;
    operations.statfs = get_space;
    operations.flush = flush;
    operations.fsync = sync_file;
    operations.release = release;
    return fuse_main(count - 3, arguments + 3, &operations, nullptr);
}
