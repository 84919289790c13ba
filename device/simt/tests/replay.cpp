// Runs recorded launches from a file with the host library that it is linked with. This is how kernels run under a sanitizer,
// which must be part of a process from its first instruction. `device::sim` writes the files.
//
//   quire_replay_<crate> launches        exits with 0; with 1 and one line after a fault; or as the sanitizer does
//
// A file is launches one after the other, numbers little-endian:
//   name: u32 length, bytes
//   grid, block: 3 x u32 each; shared bytes: u32
//   seeds: u32 count, u64 each; the launch runs once for each, with new copies of the buffers
//   buffers: u32 count, each u64 length, bytes
//   arguments: u32 count, each u32 kind; 0, a value: u32 length, bytes; 1, a pointer: u32 buffer, u64 offset; 2, a tensor
//     map: u32 buffer, 128 bytes, whose second 8 bytes become the address of the buffer
#include <quire/sim.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

struct File {
    std::FILE* stream;

    void read(void* to, size_t bytes) {
        if (std::fread(to, 1, bytes, stream) == bytes) return;
        std::fprintf(stderr, "replay: the file ends inside of a launch\n");
        std::exit(2);
    }
    template <class T>
    T number() {
        T value;
        read(&value, sizeof value);
        return value;
    }
    std::vector<unsigned char> bytes(size_t count) {
        std::vector<unsigned char> found(count);
        if (count) read(found.data(), count);
        return found;
    }
    bool ended() {
        const int next = std::fgetc(stream);
        if (next != EOF) std::ungetc(next, stream);
        return next == EOF;
    }
};

// Exactly as long as the buffer, so that the sanitizer detects accesses to the first byte past it, and aligned as device
// memory.
struct Memory {
    void* at = nullptr;
    explicit Memory(const std::vector<unsigned char>& contents) {
        if (posix_memalign(&at, 256, contents.empty() ? 1 : contents.size())) std::abort();
        if (!contents.empty()) std::memcpy(at, contents.data(), contents.size());
    }
    Memory(Memory&& other) noexcept : at(other.at) { other.at = nullptr; }
    ~Memory() { std::free(at); }
};

struct Argument {
    uint32_t kind;
    uint32_t buffer;
    uint64_t offset;
    std::vector<unsigned char> value;
};

int replay(File& file) {
    const auto name_bytes = file.bytes(file.number<uint32_t>());
    const std::string name(name_bytes.begin(), name_bytes.end());
    uint32_t grid[3], block[3];
    file.read(grid, sizeof grid);
    file.read(block, sizeof block);
    const auto shared_bytes = file.number<uint32_t>();
    std::vector<uint64_t> seeds(file.number<uint32_t>());
    for (auto& seed : seeds) seed = file.number<uint64_t>();
    std::vector<std::vector<unsigned char>> buffers(file.number<uint32_t>());
    for (auto& buffer : buffers) buffer = file.bytes(file.number<uint64_t>());
    std::vector<Argument> arguments(file.number<uint32_t>());
    for (auto& argument : arguments) {
        argument.kind = file.number<uint32_t>();
        if (argument.kind) argument.buffer = file.number<uint32_t>();
        if (argument.kind == 1) argument.offset = file.number<uint64_t>();
        else argument.value = file.bytes(argument.kind ? 128 : file.number<uint32_t>());
    }

    for (const uint64_t seed : seeds) {
        std::vector<Memory> memory(buffers.begin(), buffers.end());
        std::vector<void*> pointers(arguments.size()), args(arguments.size());
        for (size_t i = 0; i < arguments.size(); i++) {
            Argument& argument = arguments[i];
            void* const base = argument.kind ? memory.at(argument.buffer).at : nullptr;
            pointers[i] = static_cast<unsigned char*>(base) + (argument.kind == 1 ? argument.offset : 0);
            if (argument.kind == 2) std::memcpy(argument.value.data() + 8, &base, sizeof base);
            args[i] = argument.kind == 1 ? static_cast<void*>(&pointers[i]) : argument.value.data();
        }
        const quire_sim_options options = {seed};
        if (quire_sim_launch(name.c_str(), grid, block, shared_bytes, args.data(), &options)) {
            std::fprintf(stderr, "replay: seed %llu: %s\n", static_cast<unsigned long long>(seed), quire_sim_last_error().message);
            return 1;
        }
    }
    return 0;
}

}  // namespace

int main(int count, char** words) {
    File file = {count == 2 ? std::fopen(words[1], "rb") : nullptr};
    if (!file.stream) {
        std::fprintf(stderr, "usage: %s FILE (of recorded launches)\n", words[0]);
        return 2;
    }
    int code = 0;
    while (!code && !file.ended()) code = replay(file);
    std::fclose(file.stream);
    return code;
}
