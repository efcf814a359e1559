// What a CUDA program sees of its share, as JSON lines: the same commands and words as the simulated
// driver's cuda-probe, so that one set of checks runs on both.
//   cuda-probe info | hold SECS | alloc MIB [SECS] | fault | lat SECS [UNTIL-FILE] | noderights PATH...
// Build: nvcc -O2 -arch=native -cudart static -o cuda-probe cuda-probe.cu -lcuda
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <string>
#include <unistd.h>
#include <vector>

__global__ void work(float *p, int iterations) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float a = p[i];
  for (int k = 0; k < iterations; k++) a = a * 1.0000001f + 0.5f;
  p[i] = a;
}

static const char *word(CUresult result) {
  const char *name = nullptr;
  cuGetErrorName(result, &name);
  return name ? name : "CUDA_ERROR_UNKNOWN_CODE";
}

static double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static int failed(CUresult result) {
  printf("{\"event\":\"info\",\"error\":\"%s\",\"pid\":%d}\n", word(result), getpid());
  return 10;
}

static int end(CUresult result) {
  printf("{\"event\":\"end\",\"result\":\"%s\"}\n", word(result));
  return result == CUDA_SUCCESS ? 0 : 10;
}

// Opens each path as a CUDA program would; an errno says which guard stood in the way.
static int noderights(int count, char **paths) {
  for (int i = 0; i < count; i++) {
    int fd = open(paths[i], O_RDWR | O_CLOEXEC);
    const char *seen = fd >= 0 ? "ok" : errno == ENXIO ? "ENXIO" : errno == EPERM ? "EPERM"
                       : errno == ENOENT ? "ENOENT" : errno == EACCES ? "EACCES" : errno == EIO ? "EIO" : "other";
    printf("{\"event\":\"node\",\"path\":\"%s\",\"result\":\"%s\"}\n", paths[i], seen);
    if (fd >= 0) close(fd);
  }
  return 0;
}

int main(int count, char **arguments) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::string command = count > 1 ? arguments[1] : "info";
  if (command == "noderights") return noderights(count - 2, arguments + 2);
  CUresult result = cuInit(0);
  if (result) return failed(result);
  int devices = 0;
  if ((result = cuDeviceGetCount(&devices))) return failed(result);
  CUdevice device;
  if ((result = cuDeviceGet(&device, 0))) return failed(result);
  CUcontext context;
  if ((result = cuDevicePrimaryCtxRetain(&context, device)) || (result = cuCtxSetCurrent(context))) return failed(result);
  CUuuid uuid;
  cuDeviceGetUuid_v2(&uuid, device);
  int sm = 0, mps = 0;
  cuDeviceGetAttribute(&sm, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  cuDeviceGetAttribute(&mps, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device);
  size_t free_bytes, total_bytes;
  if ((result = cuMemGetInfo(&free_bytes, &total_bytes))) return failed(result);
  Dl_info where;
  bool known = dladdr(reinterpret_cast<void *>(&cuInit), &where) != 0;
  std::string id;
  for (int i = 0; i < 16; i++) {
    char hex[4];
    snprintf(hex, sizeof hex, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)uuid.bytes[i]);
    id += hex;
  }
  printf("{\"event\":\"info\",\"error\":null,\"count\":%d,\"sm\":%d,\"free_mib\":%zu,\"total_mib\":%zu,"
         "\"uuid\":\"GPU-%s\",\"mps\":%s,\"libcuda\":\"%s\",\"pid\":%d}\n",
         devices, sm, free_bytes >> 20, total_bytes >> 20, id.c_str(), mps ? "true" : "false",
         known ? where.dli_fname : "", getpid());
  double wait = count > 2 ? atof(arguments[2]) : 0;
  if (command == "hold") {
    // A small kernel now and then: an MPS client learns of its server's end when it calls the driver.
    float *p;
    cudaMalloc(&p, 32 * sizeof(float));
    for (double until = seconds() + wait; seconds() < until; usleep(50000)) {
      work<<<1, 32>>>(p, 1);
      if ((result = cuCtxSynchronize())) break;
    }
    return end(result);
  }
  if (command == "alloc") {
    CUdeviceptr pointer;
    result = cuMemAlloc(&pointer, (size_t)atol(arguments[2]) << 20);
    printf("{\"event\":\"alloc\",\"mib\":%s,\"result\":\"%s\"}\n", arguments[2], word(result));
    if (count > 3) usleep((useconds_t)(atof(arguments[3]) * 1e6));
    return end(cuCtxSynchronize());
  }
  if (command == "fault") {
    work<<<1, 32>>>(reinterpret_cast<float *>(0x10), 1);
    result = cuCtxSynchronize();
    printf("{\"event\":\"fault\",\"result\":\"%s\"}\n", word(result));
    return 10;
  }
  if (command == "lat") {
    float *p;
    cudaMalloc(&p, 16 * 256 * sizeof(float));
    std::vector<double> taken;
    for (double until = seconds() + wait; seconds() < until && !(count > 3 && access(arguments[3], F_OK) == 0);) {
      double start = seconds();
      for (int k = 0; k < 100; k++) work<<<16, 256>>>(p, 1000);
      if ((result = cuCtxSynchronize())) break;
      taken.push_back((seconds() - start) * 1e3);
    }
    std::sort(taken.begin(), taken.end());
    if (!taken.empty())
      printf("{\"event\":\"lat\",\"n\":%zu,\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"max_ms\":%.3f}\n", taken.size(),
             taken[taken.size() / 2], taken[taken.size() * 99 / 100], taken.back());
    return end(result);
  }
  return 0;
}
