/* An NVML that shares no code with NVIDIA's: the functions that nvidia-ml-py calls for us, with its C signatures.
 *
 * Its world is the folder FAKE_NVML: one folder for each GPU (gpu0, gpu1, ...) with one file for each number or name.
 * Two kinds of file interfere, in the folder of a GPU or, for calls that name no GPU, in the world's own:
 *     fail_FUNCTION   the function returns the number in it
 *     hang_FUNCTION   the function does not return while it is there, as in a driver that is wedged
 * "slow_us" in the world's own makes every call take that many microseconds.
 * Every call is written to the file "calls" before it hangs, fails or does anything.
 */

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef struct fake *nvmlDevice_t; /* its address is its index + 1 */
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    int valueType;
    nvmlReturn_t nvmlReturn;
    unsigned long long value;
} nvmlFieldValue_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

static void place(char *path, size_t size, int gpu, const char *name) {
    const char *world = getenv("FAKE_NVML");
    if (gpu < 0) snprintf(path, size, "%s/%s", world ? world : "/nonexistent", name);
    else snprintf(path, size, "%s/gpu%d/%s", world ? world : "/nonexistent", gpu, name);
}

static int read_text(int gpu, const char *name, char *text, size_t size) {
    char path[4096];
    place(path, sizeof path, gpu, name);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t got = fread(text, 1, size - 1, file);
    fclose(file);
    text[got] = 0;
    text[strcspn(text, "\n")] = 0;
    return 1;
}

static int read_number(int gpu, const char *name, unsigned long long *number) {
    char text[64];
    if (!read_text(gpu, name, text, sizeof text)) return 0;
    *number = strtoull(text, NULL, 0);
    return 1;
}

/* Write down the call, wait while it is to hang, and return how it is to fail. */
static nvmlReturn_t enter(int gpu, const char *function, const char *more) {
    char path[4096], name[128], line[256];
    unsigned long long failure;
    place(path, sizeof path, -1, "calls");
    int calls = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int length = snprintf(line, sizeof line, "%s %d%s\n", function, gpu, more);
    if (calls < 0 || write(calls, line, length) != length) return UNKNOWN;
    close(calls);
    if (read_number(-1, "slow_us", &failure)) usleep((useconds_t)failure);
    snprintf(name, sizeof name, "hang_%s", function);
    place(path, sizeof path, gpu, name);
    while (access(path, F_OK) == 0) usleep(5000);
    snprintf(name, sizeof name, "fail_%s", function);
    return read_number(gpu, name, &failure) ? (nvmlReturn_t)failure : SUCCESS;
}

static int index_of(nvmlDevice_t device) { return (int)(size_t)device - 1; }

static nvmlReturn_t number_of(nvmlDevice_t device, const char *function, const char *name, unsigned int *number) {
    unsigned long long read;
    nvmlReturn_t failure = enter(index_of(device), function, "");
    if (failure) return failure;
    if (!read_number(index_of(device), name, &read)) return NOT_SUPPORTED;
    *number = (unsigned int)read;
    return SUCCESS;
}

static nvmlReturn_t text_of(nvmlDevice_t device, const char *function, const char *name, char *text, unsigned int size) {
    char read[256];
    nvmlReturn_t failure = enter(index_of(device), function, "");
    if (failure) return failure;
    if (!read_text(index_of(device), name, read, sizeof read)) return NOT_SUPPORTED;
    if (strlen(read) >= size) return INSUFFICIENT_SIZE;
    strcpy(text, read);
    return SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { return flags ? INVALID_ARGUMENT : enter(-1, "InitWithFlags", ""); }
nvmlReturn_t nvmlShutdown(void) { return enter(-1, "Shutdown", ""); }
const char *nvmlErrorString(nvmlReturn_t result) { return result == UNKNOWN ? "Unknown Error" : "An error of the peer"; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    char path[4096];
    nvmlReturn_t failure = enter(-1, "DeviceGetCount", "");
    if (failure) return failure;
    for (*count = 0;; ++*count) {
        place(path, sizeof path, (int)*count, "");
        if (access(path, F_OK) != 0) return SUCCESS;
    }
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t failure = enter((int)index, "DeviceGetHandleByIndex", "");
    if (failure) return failure;
    *device = (nvmlDevice_t)(size_t)(index + 1);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    return text_of(device, "DeviceGetUUID", "uuid", uuid, length);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    return text_of(device, "DeviceGetName", "name", name, length);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *limit) {
    return number_of(device, "DeviceGetPowerManagementLimit", "limit_mw", limit);
}

nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *limit) {
    return number_of(device, "DeviceGetPowerManagementDefaultLimit", "default_mw", limit);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *least, unsigned int *most) {
    nvmlReturn_t failure = number_of(device, "DeviceGetPowerManagementLimitConstraints", "min_mw", least);
    unsigned long long read;
    if (failure) return failure;
    if (!read_number(index_of(device), "max_mw", &read)) return NOT_SUPPORTED;
    *most = (unsigned int)read;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int limit) {
    unsigned long long least, most;
    char path[4096], fresh[4096], more[32];
    int gpu = index_of(device);
    snprintf(more, sizeof more, " %u", limit);
    nvmlReturn_t failure = enter(gpu, "DeviceSetPowerManagementLimit", more);
    if (failure) return failure;
    if (!read_number(gpu, "min_mw", &least) || !read_number(gpu, "max_mw", &most)) return NOT_SUPPORTED;
    if (limit < least || limit > most) return INVALID_ARGUMENT;
    place(path, sizeof path, gpu, "deaf"); /* says yes and does nothing */
    if (access(path, F_OK) == 0) return SUCCESS;
    place(path, sizeof path, gpu, "limit_mw");
    place(fresh, sizeof fresh, gpu, "limit_mw.new");
    FILE *file = fopen(fresh, "w");
    if (!file) return UNKNOWN;
    fprintf(file, "%u\n", limit);
    fclose(file);
    return rename(fresh, path) == 0 ? SUCCESS : UNKNOWN;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power) {
    return number_of(device, "DeviceGetPowerUsage", "power_mw", power);
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    nvmlReturn_t failure = enter(index_of(device), "DeviceGetFieldValues", "");
    for (int at = 0; !failure && at < count; at++) {
        unsigned long long read = 0;
        int told = values[at].fieldId == 186 && read_number(index_of(device), "power_instant_mw", &read);
        values[at].nvmlReturn = told ? SUCCESS : NOT_SUPPORTED;
        values[at].value = read;
    }
    return failure;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    utilization->memory = 0;
    return number_of(device, "DeviceGetUtilizationRates", "utilization_pct", &utilization->gpu);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    nvmlReturn_t failure = enter(index_of(device), "DeviceGetCurrentClocksThrottleReasons", "");
    if (failure) return failure;
    return read_number(index_of(device), "throttle_reasons", reasons) ? SUCCESS : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    nvmlReturn_t failure = number_of(device, "DeviceGetMigMode", "mig", current);
    *pending = *current;
    return failure;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, int *mode) {
    unsigned int read = 0;
    nvmlReturn_t failure = number_of(device, "DeviceGetPersistenceMode", "persistence", &read);
    *mode = (int)read;
    return failure;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failed) {
    unsigned long long read = 0;
    nvmlReturn_t failure = number_of(device, "DeviceGetRemappedRows", "remap_pending", pending);
    *corrected = *uncorrected = 0;
    *failed = read_number(index_of(device), "remap_failed", &read) && read;
    return failure;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, unsigned long long *count) {
    unsigned int read = 0;
    nvmlReturn_t failure = number_of(device, "DeviceGetTotalEccErrors", "ecc_uncorrected", &read);
    *count = error == 1 && counter == 0 ? read : 77;
    return failure;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, int *pending) {
    unsigned int read = 0;
    nvmlReturn_t failure = number_of(device, "DeviceGetRetiredPagesPendingStatus", "retire_pending", &read);
    *pending = (int)read;
    return failure;
}
