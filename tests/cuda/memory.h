// The device: its guard, streams, events, memory and hooks, and what Python is told of.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <time.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "order.h"

namespace pretended {
using at::Tensor;
constexpr auto CUDA = c10::DeviceType::CUDA;

thread_local c10::DeviceIndex current_device = 0;  // of a new thread: 0, as in CUDA
thread_local Stream current_stream = 0;
c10::DeviceIndex num_devices = 1;
std::atomic<int64_t> num_streams{0}, num_events{0}, pinned_bytes{0}, most_pinned_bytes{0};
Order order;

// (kind, name, detail); kinds: sync, pageable, mixed, race, collective. Never called with a lock held: it waits
// for Python's, whose owner may wait for ours.
using Tell = void (*)(const char*, const char*, const char*);
std::atomic<Tell> tell{nullptr};
void say(const char* kind, const std::string& name, const std::string& detail = "") {
  if (auto told = tell.load()) told(kind, name.c_str(), detail.c_str());
}
void say_all(const Races& races, const std::string& name) {
  for (const auto& race : races) say("race", name, race);
}
std::mutex counts_lock;
std::map<std::string, int64_t> kernel_counts;
void count(const std::string& name) {
  std::lock_guard<std::mutex> held(counts_lock);
  kernel_counts[name]++;
}
void use(const Tensor& tensor, bool writes, const std::string& name, int64_t time) {
  if (!tensor.has_storage()) return;
  int64_t end = tensor.storage_offset() + (tensor.numel() ? 1 : 0);
  for (int64_t i = 0; i < tensor.dim() && tensor.numel(); i++) end += (tensor.size(i) - 1) * tensor.stride(i);
  const int64_t bytes = tensor.element_size(), begin = tensor.storage_offset();
  say_all(order.use(tensor.storage().data(), begin * bytes, end * bytes, writes, name, current_stream, time), name);
}
void host_waits(const std::string& name, const std::string& detail = "") {
  order.host_waits_for(current_stream);
  say("sync", name, detail);
}
std::string bytes_of(const Tensor& tensor) { return std::to_string(tensor.numel() * tensor.element_size()) + " bytes"; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before{CUDA, current_device};
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {CUDA, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream stream(Stream id) const { return c10::Stream(c10::Stream::UNSAFE, {CUDA, current_device}, id); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++num_streams); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++num_streams); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    auto before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream given) const override { return (void*)(intptr_t)given.id(); }
  c10::DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void** event, const c10::Stream& given, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = (void*)(intptr_t)(++num_events);
    order.record((intptr_t)*event, given.id());
  }
  void block(void* event, const c10::Stream& given) const override {
    order.wait_for_event(given.id(), (intptr_t)event);
  }
  bool queryEvent(void* event) const override {
    order.host_waits_for_event((intptr_t)event);
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream& given) const override {
    order.host_waits_for(given.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& given) const override {
    order.host_waits_for(given.id());
    say("sync", "stream.synchronize");
  }
  void synchronizeEvent(void* event) const override {
    order.host_waits_for_event((intptr_t)event);
    say("sync", "event.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    order.host_waits_for_all();
    say("sync", "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& given) const override {
    order.record_stream(data.get(), given.id());
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(CUDA, &guard);

std::mutex sizes_lock;
std::unordered_map<void*, int64_t> sizes;
int64_t device_bytes = 0, most_device_bytes = 0;
// The processor's time in what stands for the device: kernels, and what this library does about them.
std::atomic<int64_t> inside_ns{0};
struct Inside {
  static inline thread_local int depth = 0;
  int64_t begin = 0;
  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
  }
  Inside() { if (depth++ == 0) begin = now(); }
  ~Inside() { if (--depth == 0) inside_ns += now() - begin; }
};

void add(void* data, int64_t bytes) {
  std::lock_guard<std::mutex> held(sizes_lock);
  sizes[data] = bytes;
  device_bytes += bytes;
  most_device_bytes = std::max(most_device_bytes, device_bytes);
}
void release(void* data) {
  Inside inside;
  {
    std::lock_guard<std::mutex> held(sizes_lock);
    device_bytes -= sizes[data];
    sizes.erase(data);
  }
  order.free(data);
  c10::GetCPUAllocator()->raw_deallocate(data);
}
bool zeroed = false;
struct Memory : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Inside inside;
    void* data = bytes ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    if (data && zeroed) std::memset(data, 0, bytes);
    if (data) add(data, bytes);
    order.allocate(data, current_stream);
    return {data, data, &release, c10::Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

// Pinned host memory. PyTorch's allocator takes powers of two, and so the bytes are counted here.
std::mutex pinned_lock;
std::map<const char*, std::pair<size_t, int64_t>> pinned;  // asked for, taken
void unpin(void* data) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned_bytes -= pinned[(char*)data].second;
    pinned.erase((char*)data);
  }
  c10::GetCPUAllocator()->raw_deallocate(data);
}
bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound((const char*)data);
  if (after == pinned.begin()) return false;
  --after;
  return (const char*)data < after->first + std::max<size_t>(after->second.first, 1);
}
struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int64_t taken = 1;
    while (taken < (int64_t)bytes) taken *= 2;
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned[(char*)data] = {bytes, taken};
    pinned_bytes += taken;
    if (pinned_bytes > most_pinned_bytes) most_pinned_bytes = pinned_bytes.load();
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return pretended::current_device; }
  c10::DeviceIndex deviceCount() const override { return num_devices; }
  c10::DeviceIndex getCurrentDevice() const override { return pretended::current_device; }
  int getNumGPUs() const override { return num_devices; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  // The CPU's, so that draws are those of a run on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  void deviceSynchronize(c10::DeviceIndex index) const override { guard.synchronizeDevice(index); }
};
}  // namespace pretended
