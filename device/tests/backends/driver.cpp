// A CUDA driver in host code, for tests: libcuda.so.1 with the calls that device/src/driver and device/src/cuda make, strict about each of them.
//
// Work stays in its stream until it is waited for, so a missing wait reads old bytes. These are errors: a context that is not
// current, a destroyed handle, an address outside of the allocations, memory freed while work uses it, and a device that is
// released while something on it still exists. Kernels come from the host library that this library is linked with; after a
// failed kernel every later call fails, as on a GPU.
//
// While a stream is captured its work is recorded, not run; calls that a driver forbids then (waits, memory, modules), events
// and copies from and to the host end the capture. A graph uses memory, and memory that it uses must not be freed before it.
//
// Environment variables change the driver: FAKE_VERSION its version, FAKE_GPUS the number of GPUs, FAKE_INIT the result of
// cuInit, FAKE_CAPABILITY major * 10 + minor. FAKE_RETAIN is the result of opening the GPU, FAKE_FREE the MiB that other
// programs leave free, FAKE_HANG the name of a kernel that never ends. Calls that would wait for that kernel abort the program.
#include <quire/sim.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_CONTEXT = 201,
    NO_BINARY = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

using Address = unsigned long long;
using Clock = std::chrono::steady_clock;

// Captured work, and every 8-byte argument of its kernels, which include the addresses.
struct Graph {
    std::vector<std::function<void()>> work;
    std::vector<Address> words;
};

struct Stream {
    std::deque<std::function<void()>> work;
    std::unique_ptr<Graph> capture;
    bool spoilt = false;
    std::thread::id captor;
    void give(std::function<void()> next) {
        if (capture) {
            capture->work.push_back(std::move(next));
        } else {
            work.push_back(std::move(next));
        }
    }
    bool hangs = false;  // a kernel never ends, so nothing behind it runs
    void step() {
        const auto next = std::move(work.front());
        work.pop_front();
        next();
    }
    void finish() {
        while (!work.empty() && !hangs) step();
    }
};
// A point of a stream; it outlives its event if another stream waits for it.
struct Mark {
    Stream* stream;
    bool done = false;
    Clock::time_point time;
    void finish() {
        while (!done && !stream->work.empty() && !stream->hangs) stream->step();
    }
};
struct Event {
    std::shared_ptr<Mark> mark;
};
struct Kernel {
    quire_sim_kernel kernel;
    uint32_t traits[5] = {kernel.parameters, kernel.shared_bytes, kernel.overlapped, kernel.threads, kernel.rows};
    int allowed = 48 << 10;
};

// One lock for everything: work runs in the thread that waits for it.
using Lock = std::lock_guard<std::mutex>;
std::mutex lock;
int retained, broken;
std::set<Stream*> streams;
std::set<Event*> events;
std::set<void*> modules;
std::set<Graph*> graphs, executables;
std::map<std::string, Kernel*> kernels;
std::map<Address, size_t> device_memory, host_memory, constants;
thread_local void* current;
constexpr size_t MEMORY = size_t{1} << 34;
constexpr size_t GRAPH = size_t{1} << 16;
constexpr int SHARED = 227 << 10;

int number(const char* variable, int otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::atoi(text) : otherwise;
}

bool waiting() {
    for (const Stream* stream : streams)
        if (!stream->work.empty()) return true;
    return false;
}

// For calls that return when the GPU is done.
void must_return(const char* call) {
    for (const Stream* stream : streams) {
        if (!stream->hangs) continue;
        std::fprintf(stderr, "fake driver: %s waits for ever\n", call);
        std::abort();
    }
}

bool within(const std::map<Address, size_t>& memory, Address at, size_t bytes) {
    auto next = memory.upper_bound(at);
    if (next == memory.begin()) return false;
    --next;
    return at + bytes <= next->first + next->second;
}

int enter(const Stream* stream = nullptr) {
    if (broken) return broken;
    if (!current || !retained) return INVALID_CONTEXT;
    return stream && !streams.count(const_cast<Stream*>(stream)) ? INVALID_HANDLE : SUCCESS;
}

// For calls that are forbidden while this thread captures, or, with a stream, while that stream is captured.
int spoil(const Stream* named = nullptr) {
    for (Stream* stream : streams) {
        if (!stream->capture || (stream != named && stream->captor != std::this_thread::get_id())) continue;
        stream->spoilt = true;
        return CAPTURE_UNSUPPORTED;
    }
    return SUCCESS;
}

bool of_a_graph(Address at, size_t bytes) {
    for (const Graph* graph : executables)
        for (const Address word : graph->words)
            if (word >= at && word < at + bytes) return true;
    return false;
}

}  // namespace

// Name and parameters of a call, before its body.
#define CALL(name, ...) extern "C" __attribute__((visibility("default"))) int name(__VA_ARGS__)
#define NEEDS(condition, otherwise) \
    if (!(condition)) return otherwise
#define ENTER(...) \
    if (const int refused = enter(__VA_ARGS__)) return refused
#define NOT_CAPTURED(...) \
    if (const int refused = spoil(__VA_ARGS__)) return refused
#define RETURNS_WHEN_DONE() must_return(__func__)

CALL(cuDriverGetVersion, int* version) {
    const Lock guard(lock);
    *version = number("FAKE_VERSION", 13000);
    return SUCCESS;
}

CALL(cuInit, unsigned) {
    const Lock guard(lock);
    return number("FAKE_INIT", SUCCESS);
}

CALL(cuGetErrorString, int error, const char** text) {
    const Lock guard(lock);
    *text = error == LAUNCH_FAILED ? "unspecified launch failure" : "a text of the driver";
    return SUCCESS;
}

CALL(cuDeviceGetCount, int* count) {
    const Lock guard(lock);
    *count = number("FAKE_GPUS", 1);
    return SUCCESS;
}

CALL(cuDeviceGet, int* device, int ordinal) {
    const Lock guard(lock);
    *device = 7;
    return ordinal == 0 ? SUCCESS : INVALID_VALUE;
}

CALL(cuDeviceGetName, char* name, int length, int device) {
    const Lock guard(lock);
    NEEDS(device == 7, INVALID_VALUE);
    std::snprintf(name, length, "host code");
    return SUCCESS;
}

CALL(cuDeviceGetAttribute, int* value, int attribute, int device) {
    const Lock guard(lock);
    NEEDS(device == 7, INVALID_VALUE);
    const int capability = number("FAKE_CAPABILITY", 90);
    switch (attribute) {
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        case 16: *value = 1; break;
        case 97: *value = SHARED; break;
        default: return INVALID_VALUE;
    }
    return SUCCESS;
}

CALL(cuDeviceTotalMem_v2, size_t* bytes, int device) {
    const Lock guard(lock);
    NEEDS(device == 7, INVALID_VALUE);
    *bytes = MEMORY;
    return SUCCESS;
}

CALL(cuDevicePrimaryCtxRetain, void** context, int device) {
    const Lock guard(lock);
    NEEDS(device == 7, INVALID_VALUE);
    if (const int refused = number("FAKE_RETAIN", SUCCESS)) return refused;
    retained++;
    *context = &retained;
    return SUCCESS;
}

CALL(cuDevicePrimaryCtxRelease_v2, int) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    NEEDS(retained > 0, INVALID_CONTEXT);
    if (--retained == 0 && !broken && (device_memory.size() || host_memory.size() || events.size() || streams.size() || modules.size() || graphs.size() || executables.size())) {
        std::fprintf(stderr, "fake driver: left behind: %zu device and %zu host allocations, %zu events, %zu streams, %zu modules, %zu graphs\n",
                     device_memory.size(), host_memory.size(), events.size(), streams.size(), modules.size(), graphs.size() + executables.size());
        std::abort();
    }
    return SUCCESS;
}

CALL(cuCtxSetCurrent, void* context) {
    const Lock guard(lock);
    NEEDS(context == &retained && retained, INVALID_CONTEXT);
    current = context;
    return SUCCESS;
}

CALL(cuStreamCreate, Stream** stream, unsigned flags) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(flags == 1, INVALID_VALUE);
    streams.insert(*stream = new Stream);
    return SUCCESS;
}

CALL(cuStreamDestroy_v2, Stream* stream) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER(stream);
    NOT_CAPTURED(stream);
    streams.erase(stream);
    delete stream;
    return SUCCESS;
}

// Not ready at the first query of a stream with work, so that a caller must query again.
CALL(cuStreamQuery, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    const bool ready = stream->work.empty();
    stream->finish();
    return broken ? broken : ready && !stream->hangs ? SUCCESS : NOT_READY;
}

// For nccl.cpp: runs the work of a stream.
CALL(fake_driver_finish, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    stream->finish();
    return broken;
}

CALL(cuStreamWaitEvent, Stream* stream, Event* event, unsigned flags) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(events.count(event) && flags == 0, INVALID_HANDLE);
    if (event->mark->stream != stream) stream->work.push_back([mark = event->mark] { mark->finish(); });
    return SUCCESS;
}

CALL(cuEventCreate, Event** event, unsigned flags) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(flags == 0, INVALID_VALUE);
    events.insert(*event = new Event);
    return SUCCESS;
}

CALL(cuEventRecord, Event* event, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(events.count(event), INVALID_HANDLE);
    event->mark = std::make_shared<Mark>(Mark{stream});
    stream->work.push_back([mark = event->mark] {
        mark->done = true;
        mark->time = Clock::now();
    });
    return SUCCESS;
}

// Not ready at the first query, so that a caller must query again.
CALL(cuEventQuery, Event* event) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(events.count(event), INVALID_HANDLE);
    if (event->mark->done) return SUCCESS;
    event->mark->finish();
    return broken ? broken : NOT_READY;
}

CALL(cuEventElapsedTime_v2, float* milliseconds, Event* start, Event* end) {
    const Lock guard(lock);
    ENTER();
    NEEDS(events.count(start) && events.count(end), INVALID_HANDLE);
    NEEDS(start->mark->done && end->mark->done, NOT_READY);
    *milliseconds = std::chrono::duration<float, std::milli>(end->mark->time - start->mark->time).count();
    return SUCCESS;
}

CALL(cuEventDestroy_v2, Event* event) {
    const Lock guard(lock);
    ENTER();
    NEEDS(events.erase(event), INVALID_HANDLE);
    delete event;
    return SUCCESS;
}

CALL(cuMemAlloc_v2, Address* address, size_t bytes) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(bytes, INVALID_VALUE);
    NEEDS(bytes <= MEMORY, OUT_OF_MEMORY);
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(memory, 0xff, bytes);
    *address = reinterpret_cast<Address>(memory);
    device_memory[*address] = bytes;
    return SUCCESS;
}

CALL(cuMemFree_v2, Address address) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER();
    NOT_CAPTURED();
    NEEDS(!waiting() && device_memory.count(address) && !of_a_graph(address, device_memory[address]), INVALID_VALUE);
    device_memory.erase(address);
    std::free(reinterpret_cast<void*>(address));
    return SUCCESS;
}

CALL(cuMemHostAlloc, void** memory, size_t bytes, unsigned flags) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(bytes && flags == 0, INVALID_VALUE);
    NEEDS(bytes <= MEMORY, OUT_OF_MEMORY);
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(*memory, 0xff, bytes);
    host_memory[reinterpret_cast<Address>(*memory)] = bytes;
    return SUCCESS;
}

CALL(cuMemFreeHost, void* memory) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER();
    NOT_CAPTURED();
    NEEDS(!waiting() && host_memory.erase(reinterpret_cast<Address>(memory)), INVALID_VALUE);
    std::free(memory);
    return SUCCESS;
}

CALL(cuMemGetInfo_v2, size_t* available, size_t* total) {
    const Lock guard(lock);
    ENTER();
    *total = *available = MEMORY;
    for (const auto& [address, bytes] : device_memory) *available -= bytes;
    *available -= executables.size() * GRAPH;
    *available = std::min(*available, size_t(number("FAKE_FREE", MEMORY >> 20)) << 20);
    return SUCCESS;
}

CALL(cuMemsetD8Async, Address to, unsigned char value, size_t bytes, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NEEDS(within(device_memory, to, bytes), ILLEGAL_ADDRESS);
    stream->give([=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
    return SUCCESS;
}

CALL(cuMemcpyHtoDAsync_v2, Address to, const void* from, size_t bytes, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(bytes && within(device_memory, to, bytes), ILLEGAL_ADDRESS);
    stream->work.push_back([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
    return SUCCESS;
}

CALL(cuMemcpyDtoHAsync_v2, void* to, Address from, size_t bytes, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(bytes && within(device_memory, from, bytes), ILLEGAL_ADDRESS);
    stream->work.push_back([=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
    return SUCCESS;
}

CALL(cuMemcpyDtoDAsync_v2, Address to, Address from, size_t bytes, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NEEDS(bytes && within(device_memory, to, bytes) && within(device_memory, from, bytes), ILLEGAL_ADDRESS);
    stream->give([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
    return SUCCESS;
}

struct StridedCopy {
    size_t from_x, from_y;
    int from_type;
    const void* from_host;
    Address from;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    int to_type;
    void* to_host;
    Address to;
    void* to_array;
    size_t to_pitch, bytes, rows;
};

CALL(cuMemcpy2DAsync_v2, const StridedCopy* given, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    const StridedCopy copy = *given;
    const int on_device = 2;
    NEEDS(copy.bytes && copy.rows && copy.bytes <= copy.from_pitch && copy.bytes <= copy.to_pitch, INVALID_VALUE);
    NEEDS(copy.from_type == on_device && copy.to_type == on_device, INVALID_VALUE);
    NEEDS(copy.from_x == 0 && copy.from_y == 0 && copy.to_x == 0 && copy.to_y == 0, INVALID_VALUE);
    const auto end = [&](size_t pitch) { return (copy.rows - 1) * pitch + copy.bytes; };
    NEEDS(within(device_memory, copy.from, end(copy.from_pitch)), ILLEGAL_ADDRESS);
    NEEDS(within(device_memory, copy.to, end(copy.to_pitch)), ILLEGAL_ADDRESS);
    stream->give([copy] {
        for (size_t row = 0; row < copy.rows; ++row)
            std::memcpy(reinterpret_cast<void*>(copy.to + row * copy.to_pitch),
                        reinterpret_cast<const void*>(copy.from + row * copy.from_pitch), copy.bytes);
    });
    return SUCCESS;
}

struct CopyAttributes {
    int order, source_type, source_id, target_type, target_id;
    unsigned flags;
};

// Copies in reverse order, because a caller must not rely on any.
CALL(cuMemcpyBatchAsync_v2, const Address* targets, const Address* sources, const size_t* sizes, size_t count,
     const CopyAttributes* attributes, const size_t* first, size_t attribute_count, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(count && attribute_count == 1 && *first == 0 && attributes->order == 1 && attributes->flags <= 1, INVALID_VALUE);
    const auto known = [](Address at, size_t bytes) { return within(device_memory, at, bytes) || within(host_memory, at, bytes); };
    std::vector<std::function<void()>> copies;
    for (size_t i = count; i-- > 0;) {
        const Address from = sources[i], to = targets[i];
        const size_t bytes = sizes[i];
        NEEDS(bytes && known(from, bytes) && known(to, bytes), ILLEGAL_ADDRESS);
        copies.push_back([=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
    }
    stream->work.push_back([copies] { for (const auto& copy : copies) copy(); });
    return SUCCESS;
}

// For blas.cpp: checks the memory that the work reads and writes, then enqueues it.
CALL(fake_driver_enqueue, Stream* stream, const Address* addresses, const size_t* bytes, int count,
     std::function<void()>* work) {
    const Lock guard(lock);
    ENTER(stream);
    for (int i = 0; i < count; i++) NEEDS(within(device_memory, addresses[i], bytes[i]), ILLEGAL_ADDRESS);
    stream->give(std::move(*work));
    return SUCCESS;
}

CALL(cuModuleLoadData, void** module, const void* image) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    const auto* words = static_cast<const uint32_t*>(image);
    NEEDS(reinterpret_cast<uintptr_t>(image) % 8 == 0 && words[0] == 0xba55ed50, INVALID_VALUE);
    // The architecture of the only entry, which is machine code.
    const unsigned found = words[11], capability = number("FAKE_CAPABILITY", 90);
    NEEDS(found / 10 == capability / 10 && found <= capability, NO_BINARY);
    modules.insert(*module = new char);
    return SUCCESS;
}

CALL(cuModuleUnload, void* module) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER();
    NOT_CAPTURED();
    NEEDS(!waiting() && modules.erase(module), INVALID_HANDLE);
    delete static_cast<char*>(module);
    return SUCCESS;
}

CALL(cuModuleGetFunction, Kernel** function, void* module, const char* name) {
    const Lock guard(lock);
    ENTER();
    NEEDS(modules.count(module), INVALID_HANDLE);
    for (size_t i = 0; i < quire_sim_kernel_count() && !kernels[name]; i++) {
        const quire_sim_kernel kernel = quire_sim_kernel_at(i);
        if (!std::strcmp(kernel.name, name)) kernels[name] = new Kernel{kernel};
    }
    *function = kernels[name];
    return *function ? SUCCESS : NOT_FOUND;
}

// The only constants are those of the QUIRE_EXPORT macros.
CALL(cuModuleGetGlobal_v2, Address* address, size_t* bytes, void* module, const char* name) {
    const Lock guard(lock);
    ENTER();
    NEEDS(modules.count(module), INVALID_HANDLE);
    for (const auto& [kernel, found] : kernels) {
        if (!found || kernel + "_traits" != name) continue;
        *address = reinterpret_cast<Address>(found->traits);
        *bytes = sizeof found->traits;
        constants[*address] = *bytes;
        return SUCCESS;
    }
    return NOT_FOUND;
}

CALL(cuMemcpyDtoH_v2, void* to, Address from, size_t bytes) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER();
    NOT_CAPTURED();
    NEEDS(within(constants, from, bytes), ILLEGAL_ADDRESS);
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return SUCCESS;
}

// Past the last parameter a driver returns an error, which compute-sanitizer reports.
CALL(cuFuncGetParamInfo, Kernel* function, size_t index, size_t* offset, size_t* size) {
    const Lock guard(lock);
    ENTER();
    if (index >= function->kernel.parameters) {
        std::fprintf(stderr, "fake driver: %s has no parameter %zu\n", function->kernel.name, index);
        std::abort();
    }
    *offset = 0;
    *size = function->kernel.parameter_bytes[index];
    return SUCCESS;
}

CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* blocks, Kernel* function, int threads, size_t shared_bytes) {
    const Lock guard(lock);
    ENTER();
    NEEDS(threads > 0 && threads <= 1024, INVALID_VALUE);
    *blocks = shared_bytes > function->kernel.shared_bytes ? 1 : 2;
    return SUCCESS;
}

CALL(cuFuncGetAttribute, int* value, int attribute, Kernel* function) {
    const Lock guard(lock);
    ENTER();
    NEEDS(attribute == 8, INVALID_VALUE);
    *value = function->allowed;
    return SUCCESS;
}

CALL(cuFuncSetAttribute, Kernel* function, int attribute, int value) {
    const Lock guard(lock);
    ENTER();
    NEEDS(attribute == 8 && value <= SHARED, INVALID_VALUE);
    function->allowed = value;
    return SUCCESS;
}

// Makes the map of the simulator; accepts only the settings that the backend uses.
CALL(cuTensorMapEncodeTiled, uint64_t* map, int type, uint32_t rank, Address address, const uint64_t* sizes, const uint64_t* strides,
     const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
    NEEDS(type == 1 && rank == 4 && address % 16 == 0 && interleave == 0 && swizzle == 3 && promotion == 3 && fill == 0, INVALID_VALUE);
    for (int i = 0; i < 4; i++) NEEDS(sizes[i] && box[i] && box[i] <= 256 && steps[i] == 1 && (i == 3 || strides[i] % 16 == 0), INVALID_VALUE);
    const auto pair = [](uint32_t low, uint32_t high) { return low | uint64_t{high} << 32; };
    const uint64_t words[16] = {0x70616d726f736e74, address,    pair(2, 128), sizes[0], sizes[1], sizes[2],
                                sizes[3],           strides[0], strides[1],   strides[2], pair(box[0], box[1]), pair(box[2], box[3])};
    std::memcpy(map, words, sizeof words);
    return SUCCESS;
}

// CUlaunchAttribute and CUlaunchConfig.
struct Attribute {
    int id;
    char pad[4];
    union {
        int serialization_allowed;
        char bytes[64];
    };
};
struct Config {
    uint32_t grid[3], block[3], shared_bytes;
    Stream* stream;
    const Attribute* attributes;
    unsigned count;
};

// Launches may overlap exactly if their kernel waits.
CALL(cuLaunchKernelEx, const Config* config, Kernel* function, void** args, void** extra) {
    const Lock guard(lock);
    const auto [x, y, z] = config->block;
    const uint32_t shared_bytes = config->shared_bytes;
    Stream* const stream = config->stream;
    ENTER(stream);
    NEEDS(config->grid[0] && config->grid[1] && config->grid[2] && !extra, INVALID_VALUE);
    NEEDS(uint64_t{x} * y * z && uint64_t{x} * y * z <= 1024, INVALID_VALUE);
    NEEDS(shared_bytes >= function->kernel.shared_bytes && shared_bytes <= static_cast<unsigned>(function->allowed), INVALID_VALUE);
    NEEDS(config->count == function->kernel.overlapped, INVALID_VALUE);
    for (unsigned i = 0; i < config->count; i++) {
        constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
        const Attribute& attribute = config->attributes[i];
        NEEDS(attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION && attribute.serialization_allowed == 1, INVALID_VALUE);
    }
    // The call copies the arguments.
    std::vector<std::vector<char>> values;
    for (uint32_t i = 0; i < function->kernel.parameters; i++) {
        const char* value = static_cast<const char*>(args[i]);
        values.emplace_back(value, value + function->kernel.parameter_bytes[i]);
        if (stream->capture && values.back().size() == sizeof(Address)) {
            stream->capture->words.push_back(*reinterpret_cast<const Address*>(value));
        }
    }
    const char* hanging = std::getenv("FAKE_HANG");
    if (hanging && !std::strcmp(hanging, function->kernel.name)) {
        stream->give([=] { stream->hangs = true; });
        return SUCCESS;
    }
    stream->give([=, launch = *config]() mutable {
        std::vector<void*> pointers;
        for (auto& value : values) pointers.push_back(value.data());
        const quire_sim_options options{0};
        if (quire_sim_launch(function->kernel.name, launch.grid, launch.block, launch.shared_bytes, pointers.data(), &options)) broken = LAUNCH_FAILED;
    });
    return SUCCESS;
}

// Captures of this thread only (CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).
CALL(cuStreamBeginCapture_v2, Stream* stream, int mode) {
    const Lock guard(lock);
    ENTER(stream);
    NEEDS(mode == 1 && !stream->capture, INVALID_VALUE);
    stream->capture = std::make_unique<Graph>();
    stream->captor = std::this_thread::get_id();
    stream->spoilt = false;
    return SUCCESS;
}

CALL(cuStreamEndCapture, Stream* stream, Graph** graph) {
    const Lock guard(lock);
    ENTER(stream);
    NEEDS(stream->capture && stream->captor == std::this_thread::get_id(), INVALID_VALUE);
    std::unique_ptr<Graph> captured = std::move(stream->capture);
    *graph = nullptr;
    NEEDS(!stream->spoilt, CAPTURE_INVALIDATED);
    graphs.insert(*graph = captured.release());
    return SUCCESS;
}

CALL(cuGraphInstantiateWithFlags, Graph** executable, Graph* graph, unsigned long long flags) {
    const Lock guard(lock);
    ENTER();
    NOT_CAPTURED();
    NEEDS(graphs.count(graph) && flags == 0, INVALID_VALUE);
    executables.insert(*executable = new Graph(*graph));
    return SUCCESS;
}

CALL(cuGraphUpload, Graph* executable, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(executables.count(executable), INVALID_HANDLE);
    return SUCCESS;
}

CALL(cuGraphLaunch, Graph* executable, Stream* stream) {
    const Lock guard(lock);
    ENTER(stream);
    NOT_CAPTURED(stream);
    NEEDS(executables.count(executable), INVALID_HANDLE);
    for (const auto& work : executable->work) stream->give(work);
    return SUCCESS;
}

CALL(cuGraphDestroy, Graph* graph) {
    const Lock guard(lock);
    ENTER();
    NEEDS(graphs.erase(graph), INVALID_HANDLE);
    delete graph;
    return SUCCESS;
}

CALL(cuGraphExecDestroy, Graph* executable) {
    const Lock guard(lock);
    RETURNS_WHEN_DONE();
    ENTER();
    NEEDS(!waiting() && executables.erase(executable), INVALID_HANDLE);
    delete executable;
    return SUCCESS;
}
