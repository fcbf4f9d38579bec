// Loads the CUDA driver, and puts its errors into words: see cuda_shim.h.
#include "gpu/cuda_shim.h"

#include <dlfcn.h>

namespace fastckpt::cuda {

namespace {

std::string last_error() {
    const char* text = dlerror();
    return text == nullptr ? "unknown error" : text;
}

template <typename Function>
void find(void* library, const std::string& path, const char* symbol, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, symbol));
    if (function == nullptr) throw Unavailable(path + " has no " + symbol + ": update the driver");
}

}  // namespace

Driver::Driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Unavailable(last_error());
#define FASTCKPT_CUDA_FIND(name, symbol, arguments) find(library, path, #symbol, name);
    FASTCKPT_CUDA_FUNCTIONS(FASTCKPT_CUDA_FIND)
#undef FASTCKPT_CUDA_FIND
#define FASTCKPT_CUDA_FIND(name, symbol, arguments) \
    name = reinterpret_cast<decltype(name)>(dlsym(library, #symbol));
    FASTCKPT_CUDA_LATER_FUNCTIONS(FASTCKPT_CUDA_FIND)
#undef FASTCKPT_CUDA_FIND
    const Result result = init(0);
    if (result != kSuccess) throw Unavailable(path + ": cuInit failed: " + text(result));
}

std::string Driver::text(Result result) const {
    const char* name = nullptr;
    const char* meaning = nullptr;
    if (error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    if (error_string(result, &meaning) != kSuccess || meaning == nullptr) meaning = "no text";
    return std::string(name) + " (" + std::to_string(result) + "): " + meaning;
}

int Driver::version() const {
    int found = 0;
    return driver_version(&found) == kSuccess ? found : 0;
}

}  // namespace fastckpt::cuda
