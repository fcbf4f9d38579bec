// Loads cuFile and puts its errors into words: see cufile_shim.h.
#include "gds/cufile_shim.h"

#include <dlfcn.h>
#include <unistd.h>

#include <system_error>

namespace fastckpt::cufile {

namespace {

// cuFile looks up disks here. Containers seldom have it, and the library does not say so.
constexpr char kUdev[] = "/run/udev";

std::string last_error() {
    const char* text = dlerror();
    return text == nullptr ? "unknown error" : text;
}

template <typename Function>
void find(void* library, const char* symbol, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
}

}  // namespace

Library::Library(const std::string& path, std::shared_ptr<const cuda::Driver> driver,
                 const std::string& modules)
    : driver_(std::move(driver)) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Unavailable("cuFile cannot be loaded: " + last_error());
#define FASTCKPT_CUFILE_FIND(result, name, symbol, arguments) find(library, #symbol, name);
    FASTCKPT_CUFILE_FUNCTIONS(FASTCKPT_CUFILE_FIND)
    FASTCKPT_CUFILE_OPTIONAL(FASTCKPT_CUFILE_FIND)
#undef FASTCKPT_CUFILE_FIND
#define FASTCKPT_CUFILE_NEED(result, name, symbol, arguments) \
    if (name == nullptr) throw Unavailable(path + " has no " #symbol);
    FASTCKPT_CUFILE_FUNCTIONS(FASTCKPT_CUFILE_NEED)
#undef FASTCKPT_CUFILE_NEED
    if (access(modules.c_str(), R_OK) != 0)
        throw Unavailable(modules +
                          " cannot be read: there is no telling whether nvidia-fs is loaded");
    const Error error = driver_open();
    if (error.code == DRIVER_ALREADY_OPEN) return;  // whoever opened it closes it
    if (error.code != 0) {
        std::string why = path + ": cuFileDriverOpen failed: " + text(error);
        if (access(kUdev, F_OK) != 0)
            why += "; " + std::string(kUdev) +
                   " does not exist: a container needs the host's, mounted there";
        throw Unavailable(why);
    }
    opened_ = true;
}

// Old libraries have only the first version; where both exist, it does less.
Library::~Library() {
    if (!opened_) return;
    if (driver_close_v2 != nullptr)
        driver_close_v2();
    else if (driver_close_v1 != nullptr)
        driver_close_v1();
}

std::string Library::text(Error error) const {
    const char* name = nullptr;
    const char* meaning = "no text";
    switch (error.code) {
#define FASTCKPT_CUFILE_CASE(code, code_name, code_meaning) \
    case code:                                              \
        name = #code_name;                                  \
        meaning = code_meaning;                             \
        break;
        FASTCKPT_CUFILE_ERRORS(FASTCKPT_CUFILE_CASE)
#undef FASTCKPT_CUFILE_CASE
    }
    std::string out = name == nullptr ? "unknown error" : std::string("CU_FILE_") + name;
    out += " (" + std::to_string(error.code) + "): " + meaning;
    if (error.cuda != cuda::kSuccess) out += ": " + driver_->text(error.cuda);
    return out;
}

std::string Library::transfer_text(ssize_t result, int error_number) const {
    if (result == 0) return "nothing was transferred";
    if (result == -1)
        return std::generic_category().message(error_number) + " (errno " +
               std::to_string(error_number) + ")";
    return text({static_cast<int>(-result), cuda::kSuccess});
}

int Library::version() const {
    int found = 0;
    return get_version != nullptr && get_version(&found).code == 0 ? found : 0;
}

Properties Library::properties() const {
    Properties found{};
    return driver_properties(&found).code == 0 ? found : Properties{};
}

}  // namespace fastckpt::cufile
