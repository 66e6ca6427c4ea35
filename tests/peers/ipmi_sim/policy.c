/*
 * A plug-in for OpenIPMI's ipmi_sim, which has no power restore policy of its own.
 *
 * Answers Get Chassis Status (00h/01h) and Set Power Restore Policy (00h/06h) as IPMI 2.0 sections 28.2 and 28.8 say,
 * and DCMI's Get Power Reading (2Ch/02h) as DCMI 1.5 section 6.6.1 says. ipmi_sim knows no DCMI and keeps its network
 * function for administrators (D4h); a BMC gives the reading to an operator. So ipmi_cmd_permitted is replaced, which
 * works only where this file is preloaded as well.
 * The option string of loadlib is a folder with five files, each holding one line:
 *
 *   policy  0 always-off, 1 last-state, 2 always-on; outlives ipmi_sim, as a BMC's memory outlives a loss of AC
 *   faults  LIE CODE BUSY DELAY_MS STATUS_BYTES: acknowledge without storing; completion code of a set (0: none);
 *           answer 0xC0 to so many commands; wait before each answer; cut or stretch the status answer (0: 3 bytes)
 *   heard   appended to: one word for each command answered
 *   power   1 or 0, as chassis.sh has it; not there: 1
 *   watts   what the host draws; not there: this BMC has no DCMI
 *
 * Built for OpenIPMI 2.0.33 (Debian 12): there a command handler has no emulator argument.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <OpenIPMI/serv.h>
#include <OpenIPMI/mcserv.h>

#define NETFN_CHASSIS 0x00
#define GET_CHASSIS_STATUS 0x01
#define SET_POWER_RESTORE_POLICY 0x06
#define NETFN_GROUP 0x2c
#define GROUP_DCMI 0xdc
#define GET_POWER_READING 0x02
#define IS_MEASURED 0x40
#define MAX_STATUS 16

struct faults {
	int lie;
	int code;
	int busy;
	int delay_ms;
	int status_bytes;
};

static char folder[400];

static FILE *open_file(const char *name, const char *mode)
{
	char path[512];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return fopen(path, mode);
}

static void heard(const char *word)
{
	FILE *file = open_file("heard", "a");

	if (file) {
		fprintf(file, "%s\n", word);
		fclose(file);
	}
}

static struct faults read_faults(void)
{
	struct faults now = { 0, 0, 0, 0, 0 };
	FILE *file = open_file("faults", "r");

	if (file) {
		if (fscanf(file, "%d %i %d %d %d", &now.lie, &now.code, &now.busy, &now.delay_ms,
			   &now.status_bytes) != 5)
			memset(&now, 0, sizeof(now));
		fclose(file);
	}
	return now;
}

/* Wait, and say whether this command is to be answered with "busy". */
static int misbehave(struct faults *now)
{
	FILE *file;

	*now = read_faults();
	if (now->delay_ms > 0)
		usleep((useconds_t)now->delay_ms * 1000);
	if (now->busy <= 0)
		return 0;
	file = open_file("faults", "w");
	if (file) {
		fprintf(file, "%d %d %d %d %d\n", now->lie, now->code, now->busy - 1, now->delay_ms,
			now->status_bytes);
		fclose(file);
	}
	heard("busy");
	return 1;
}

static unsigned char read_policy(void)
{
	int policy = 0;
	FILE *file = open_file("policy", "r");

	if (file) {
		if (fscanf(file, "%d", &policy) != 1)
			policy = 0;
		fclose(file);
	}
	return policy & 3;
}

static unsigned char read_power(void)
{
	int power = 1;
	FILE *file = open_file("power", "r");

	if (file) {
		if (fscanf(file, "%d", &power) != 1)
			power = 1;
		fclose(file);
	}
	return power & 1;
}

static int store_policy(unsigned char policy)
{
	FILE *file = open_file("policy", "w");

	if (!file)
		return -1;
	fprintf(file, "%d\n", policy);
	return fclose(file);
}

static void refuse(unsigned char code, unsigned char *reply, unsigned int *reply_len)
{
	reply[0] = code;
	*reply_len = 1;
}

static void get_status(lmc_data_t *mc, msg_t *msg, unsigned char *reply, unsigned int *reply_len, void *data)
{
	struct faults now;
	unsigned int bytes;

	(void)mc; (void)msg; (void)data;
	if (misbehave(&now)) {
		refuse(0xc0, reply, reply_len);
		return;
	}
	bytes = now.status_bytes > 0 && now.status_bytes <= MAX_STATUS ? now.status_bytes : 3;
	memset(reply, 0, bytes + 1);
	reply[1] = read_power() | read_policy() << 5;
	*reply_len = bytes + 1;
	heard("status");
}

static void set_policy(lmc_data_t *mc, msg_t *msg, unsigned char *reply, unsigned int *reply_len, void *data)
{
	struct faults now;
	unsigned char policy;

	(void)mc; (void)data;
	if (misbehave(&now)) {
		refuse(0xc0, reply, reply_len);
		return;
	}
	heard("set");
	if (now.code) {
		refuse(now.code, reply, reply_len);
		return;
	}
	if (msg->len < 1) {
		refuse(0xc7, reply, reply_len);
		return;
	}
	policy = msg->data[0] & 7;
	if (policy > 3) {
		refuse(0xcc, reply, reply_len);
		return;
	}
	if (policy < 3 && !now.lie && store_policy(policy)) {
		refuse(0xff, reply, reply_len);
		return;
	}
	reply[0] = 0;
	reply[1] = 0x07;
	*reply_len = 2;
}

static int read_watts(void)
{
	int watts = -1;
	FILE *file = folder[0] ? open_file("watts", "r") : NULL;

	if (file) {
		if (fscanf(file, "%d", &watts) != 1)
			watts = -1;
		fclose(file);
	}
	return watts;
}

static void get_power(lmc_data_t *mc, msg_t *msg, unsigned char *reply, unsigned int *reply_len, void *data)
{
	struct faults now;
	int watts = read_watts();

	(void)mc; (void)data;
	if (watts < 0 || msg->cmd != GET_POWER_READING) {
		refuse(0xc1, reply, reply_len);
		return;
	}
	if (misbehave(&now)) {
		refuse(0xc0, reply, reply_len);
		return;
	}
	memset(reply, 0, 19);
	reply[1] = GROUP_DCMI;
	reply[2] = watts & 0xff;
	reply[3] = watts >> 8 & 0xff;
	reply[18] = IS_MEASURED;
	*reply_len = 19;
	heard("watts");
}

int ipmi_cmd_permitted(unsigned char priv, unsigned char netfn, unsigned char cmd)
{
	int (*theirs)(unsigned char, unsigned char, unsigned char);

	if (netfn == NETFN_GROUP && cmd == GET_POWER_READING && read_watts() >= 0)
		return 1;
	theirs = (int (*)(unsigned char, unsigned char, unsigned char))dlsym(RTLD_NEXT, "ipmi_cmd_permitted");
	return theirs ? theirs(priv, netfn, cmd) : 0;
}

int ipmi_sim_module_print_version(sys_data_t *sys, char *options)
{
	(void)sys; (void)options;
	printf("power restore policy 1\n");
	return 0;
}

int ipmi_sim_module_init(sys_data_t *sys, const char *options)
{
	(void)sys;
	if (!options || strlen(options) >= sizeof(folder))
		return -1;
	strcpy(folder, options);
	return 0;
}

int ipmi_sim_module_post_init(sys_data_t *sys)
{
	(void)sys;
	ipmi_emu_register_group_extension_handler(GROUP_DCMI, get_power, NULL);
	if (ipmi_emu_register_cmd_handler(NETFN_CHASSIS, GET_CHASSIS_STATUS, get_status, NULL))
		return -1;
	return ipmi_emu_register_cmd_handler(NETFN_CHASSIS, SET_POWER_RESTORE_POLICY, set_policy, NULL);
}
