/*
 * Stands in for the kernel's IPMI device behind a FIFO: preloaded, it answers the two ioctl()s that we use.
 *
 * Structures and numbers are <linux/ipmi.h>'s, so that ours in Python are held against the kernel's own. The FIFO is
 * what a program opens and polls: a byte in it is a message that waits. FAKE_IPMI is a folder:
 *
 *   policy   0 always-off, 1 last-state, 2 always-on
 *   faults   LIE CODE BUSY STALE MUTE BYTES ERRNO: as in ipmi_sim/policy.c; STALE: so many foreign answers before each
 *            one; MUTE: no answer; BYTES: of the status answer (0: 3); ERRNO: every send fails with it
 *   timer    USE ACTION EXPIRED TENTHS STARTED_MS: the watchdog; STARTED_MS 0: stopped
 *   tricks   BYTES FIRM SLOW CODE: of the watchdog's answer (8); a set that does not stick; a start that does nothing
 *            and is not told; completion code of its set
 *   board    DEVICE in hex, CAUSE, WATTS: of Get Device ID, of the restart, of DCMI (-1: refused)
 *   heard    appended to: NETFN/CMD of each command
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/ioctl.h>
#include <linux/ipmi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct waiting {
	long msgid;
	unsigned char netfn, cmd, data[300];
	unsigned short len;
};

static struct waiting queue[256];
static int first, last;

static FILE *open_file(const char *name, const char *mode)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", getenv("FAKE_IPMI"), name);
	return fopen(path, mode);
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Set, start and read the watchdog as IPMI 2.0 sections 27.5 to 27.7 say; returns the length of the answer. */
static int watchdog(struct ipmi_msg *msg, unsigned char *answer)
{
	int bytes = 8, firm = 0, slow = 0, code = 0, use = 0, action = 0, expired = 0, tenths = 0;
	long started = 0, left;
	FILE *file = open_file("tricks", "r");

	if (file) {
		if (fscanf(file, "%d %d %d %i", &bytes, &firm, &slow, &code) != 4)
			abort();
		fclose(file);
	}
	file = open_file("timer", "r");
	if (file) {
		if (fscanf(file, "%d %d %d %d %ld", &use, &action, &expired, &tenths, &started) != 5)
			abort();
		fclose(file);
	}
	if (msg->cmd == 0x25) {
		left = started ? tenths - (now_ms() - started) / 100 : tenths;
		left = left < 0 ? 0 : left;
		answer[1] = use | (started && !slow ? 0x40 : 0);
		answer[2] = action;
		answer[4] = expired;
		answer[5] = tenths;
		answer[6] = tenths >> 8;
		answer[7] = left;
		answer[8] = left >> 8;
		return 1 + bytes;
	}
	if (msg->cmd == 0x22 && !tenths) {
		answer[0] = 0x80;
		return 1;
	}
	if (msg->cmd == 0x24 && code) {
		answer[0] = code;
		return 1;
	}
	if (msg->cmd == 0x24 && !firm) {
		use = msg->data[0] & 7;
		action = msg->data[1];
		expired &= ~msg->data[3];
		tenths = msg->data[4] | msg->data[5] << 8;
		started = msg->data[0] & 0x40 ? started : 0;
	}
	if (msg->cmd == 0x22 && slow != 2)
		started = now_ms();
	file = open_file("timer", "w");
	fprintf(file, "%d %d %d %d %ld\n", use, action, expired, tenths, started);
	fclose(file);
	return 1;
}

/* Who it is, or what it draws; returns the length of the answer. */
static int board(struct ipmi_msg *msg, unsigned char *answer)
{
	char device[64] = "-";
	int cause = 6, watts = -1, len = 1;
	unsigned int byte;
	FILE *file = open_file("board", "r");

	if (file) {
		if (fscanf(file, "%63s %d %d", device, &cause, &watts) != 3)
			abort();
		fclose(file);
	}
	if (msg->cmd == 0x01 && sscanf(device, "%2x", &byte) == 1) {
		while (sscanf(device + 2 * (len - 1), "%2x", &byte) == 1)
			answer[len++] = byte;
		return len;
	}
	if (msg->cmd == 0x02 && watts >= 0) {
		answer[1] = 0xdc;
		answer[2] = watts;
		answer[3] = watts >> 8;
		answer[18] = 0x40;
		return 19;
	}
	if (msg->cmd == 0x07 && cause >= 0) {
		answer[1] = cause;
		return 3;
	}
	answer[0] = 0xc1;
	return 1;
}

static void queue_answer(int fd, long msgid, int netfn, int cmd, const unsigned char *data, int len)
{
	struct waiting *w = &queue[last++ % 256];

	w->msgid = msgid;
	w->netfn = netfn | 1;
	w->cmd = cmd;
	w->len = len;
	memcpy(w->data, data, len);
	if (write(fd, "x", 1) != 1)
		abort();
}

static int send_command(int fd, struct ipmi_req *req)
{
	int lie = 0, code = 0, busy = 0, stale = 0, mute = 0, bytes = 0, number = 0, policy = 0, len = 1;
	struct ipmi_system_interface_addr *to = (void *)req->addr;
	unsigned char answer[300] = { 0 };
	FILE *file = open_file("faults", "r");

	if (file) {
		if (fscanf(file, "%d %i %d %d %d %d %d", &lie, &code, &busy, &stale, &mute, &bytes, &number) != 7)
			abort();
		fclose(file);
	}
	if (number) {
		errno = number;
		return -1;
	}
	if (to->addr_type != IPMI_SYSTEM_INTERFACE_ADDR_TYPE || to->channel != IPMI_BMC_CHANNEL ||
	    req->addr_len != sizeof(*to)) {
		errno = EINVAL;
		return -1;
	}
	file = open_file("heard", "a");
	fprintf(file, "%02X/%02X\n", req->msg.netfn, req->msg.cmd);
	fclose(file);
	file = open_file("policy", "r");
	if (!file || fscanf(file, "%d", &policy) != 1)
		abort();
	fclose(file);
	if (busy) {
		file = open_file("faults", "w");
		fprintf(file, "%d %d %d %d %d %d %d\n", lie, code, busy - 1, stale, mute, bytes, number);
		fclose(file);
		answer[0] = 0xc0;
	} else if (req->msg.netfn == 0 && req->msg.cmd == 1) {
		answer[1] = 0x01 | policy << 5;
		answer[2] = 0x01;
		len = 1 + (bytes ? bytes : 3);
	} else if (req->msg.netfn == 0 && req->msg.cmd == 6 && code) {
		answer[0] = code;
	} else if (req->msg.netfn == 0 && req->msg.cmd == 6 && req->msg.data_len == 1) {
		if (req->msg.data[0] < 3 && !lie) {
			file = open_file("policy", "w");
			fprintf(file, "%d\n", req->msg.data[0]);
			fclose(file);
		}
		answer[1] = 7;
		len = 2;
	} else if (req->msg.netfn == 6 && req->msg.cmd >= 0x22) {
		len = watchdog(&req->msg, answer);
	} else if (req->msg.netfn != 0 || req->msg.cmd == 7) {
		len = board(&req->msg, answer);
	} else {
		answer[0] = 0xc1;
	}
	while (stale--)
		queue_answer(fd, req->msgid + 1000, req->msg.netfn, req->msg.cmd, (unsigned char *)"\0\x41", 2);
	if (!mute)
		queue_answer(fd, req->msgid, req->msg.netfn, req->msg.cmd, answer, len);
	return 0;
}

static int receive(int fd, struct ipmi_recv *recv)
{
	struct waiting *w;
	char byte;

	if (first == last || read(fd, &byte, 1) != 1) {
		errno = EAGAIN;
		return -1;
	}
	w = &queue[first++ % 256];
	recv->recv_type = IPMI_RESPONSE_RECV_TYPE;
	recv->msgid = w->msgid;
	recv->msg.netfn = w->netfn;
	recv->msg.cmd = w->cmd;
	if (w->len > recv->msg.data_len) {
		memcpy(recv->msg.data, w->data, recv->msg.data_len);
		errno = EMSGSIZE;
		return -1;
	}
	memcpy(recv->msg.data, w->data, w->len);
	recv->msg.data_len = w->len;
	return 0;
}

int ioctl(int fd, unsigned long request, ...)
{
	static int (*real)(int, unsigned long, void *);
	va_list args;
	void *told;

	va_start(args, request);
	told = va_arg(args, void *);
	va_end(args);
	if ((unsigned int)request == IPMICTL_SEND_COMMAND)
		return send_command(fd, told);
	if ((unsigned int)request == IPMICTL_RECEIVE_MSG_TRUNC)
		return receive(fd, told);
	if (!real)
		real = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
	return real(fd, request, told);
}
